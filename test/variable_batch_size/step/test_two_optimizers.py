"""Two networks, each with an optimizer of its own, over one sampler."""

import pytest
import torch
from support.xla_replica.replicas import row
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
import xla_replica

TRACE = [16, 32, 8, 24]


class Game:
    """A generator and its discriminator, trained by the recipe of the FAQ."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        samples = torch.randn(160, 4, generator=generator, dtype=torch.float64)
        dataset = TensorDataset(samples, samples.roll(1, 0))
        torch.manual_seed(1)
        self.maker = nn.Linear(4, 4).double()
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        options = {"minibatch_size": 4, "on_end": "cycle", "verbose": False}
        self.sampler = vbs.CustomSampler(dataset, TRACE, **options)
        self.loader = DataLoader(dataset, batch_sampler=self.sampler)
        self.optimizers = []
        for each in (self.judge, self.maker):
            inner = torch.optim.SGD(each.parameters(), 0.2, momentum=0.9)
            wrapper = vbs.LinearRuleOptimizer(inner, self.sampler, 16, lockstep=True)
            self.optimizers.append(wrapper)

    def minibatch(self, real: torch.Tensor, noise: torch.Tensor) -> list[int]:
        fake = self.maker(noise)
        lost = softplus(-self.judge(real)) + softplus(self.judge(fake.detach()))
        lost.mean().backward()
        found = [self.optimizers[0].step()]
        self.judge.requires_grad_(False)
        softplus(-self.judge(fake)).mean().backward()
        self.judge.requires_grad_(True)
        return [*found, self.optimizers[1].step()]

    def run(self, num_epochs: int) -> list[torch.Tensor]:
        for epoch in range(self.sampler.epoch, num_epochs):
            for each in (self.sampler, *self.optimizers):
                each.set_epoch(epoch)
            minibatches = iter(self.loader)
            plan = self.sampler.plan
            for num in plan.num_substeps(self.sampler.rank)[plan.start_step :]:
                for _ in range(num):
                    self.minibatch(*next(minibatches))
                if num == 0:
                    assert [each.join_step() for each in self.optimizers] == [0, 1]
        modules = nn.ModuleList([self.maker, self.judge])
        return [parameter.detach().clone() for parameter in modules.parameters()]


def train(rank: int) -> list[torch.Tensor]:
    return Game().run(2)


@pytest.mark.parametrize("backend", [row("cpu", 2), row("cpu", 4)])
def test_weights_do_not_depend_on_the_number_of_replicas(backend):
    expected = train(0)
    for found in backend.run(train):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_both_are_updated_when_the_last_loss_of_a_step_has_gone_back():
    game, weights = Game(), []
    for minibatch in game.loader:
        weights.append(game.judge[0].weight.detach().clone())
        numbers = game.minibatch(*minibatch)
        assert numbers == [0, int(len(weights) % 4 == 0)]
        if len(weights) == 4:
            break
    assert all(torch.equal(each, weights[0]) for each in weights)
    assert not torch.equal(game.judge[0].weight, weights[0])


@pytest.mark.parametrize("first", [0, 1])
def test_a_checkpointer_of_one_saves_the_other_after_its_update_too(first, tmp_path):
    expected = Game().run(2)
    for num_epochs in (1, 2):
        game = Game()
        owner, other = game.optimizers[first], game.optimizers[1 - first]
        parts = {"judge": game.judge, "maker": game.maker, "other": other}
        checkpointer = vbs.Checkpointer(tmp_path, owner, every_updates=1, **parts)
        checkpointer.load()
        owner.attach(checkpointer)
        found = game.run(num_epochs)
    assert checkpointer.num_updates == 2 * game.sampler.plan.num_steps
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_happens_between_the_two_steps_is_refused():
    def begun() -> Game:
        game = Game()
        minibatches = iter(game.loader)
        for _ in range(3):
            game.minibatch(*next(minibatches))
        real, _ = next(minibatches)
        game.judge(real).mean().backward()
        game.optimizers[0].step()
        game.judge(real).mean().backward()
        return game

    game = begun()
    with pytest.raises(ValueError, match=r"not all 2 optimizers .* ended the step"):
        game.optimizers[0].step()
    for error, message, change in (
        (ValueError, "set it back", lambda game: game.judge.requires_grad_(False)),
        (xla_replica.ReplicaError, "changed within step 0",
         lambda game: game.optimizers[0].param_groups[0].update(lr=0.3)),
    ):  # fmt: skip
        game = begun()
        game.maker(torch.ones(4, 4, dtype=torch.float64)).mean().backward()
        change(game)
        with pytest.raises(error, match=message):
            game.optimizers[1].step()
