"""Matrix products keep all their digits, and afterwards settings are what they were."""

from types import SimpleNamespace

import pytest
import torch
from support.xla_replica.replicas import on_xla

import xla_replica
from tools.tpu.program_checks import Program, products

GPU, CPU = torch.device("cuda"), torch.device("cpu")  # each everywhere has settings
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def _settings():
    before = torch.get_float32_matmul_precision(), MATMUL.fp32_precision
    yield
    torch.set_float32_matmul_precision(before[0])
    MATMUL.fp32_precision = before[1]


@pytest.mark.parametrize("chosen", ["tf32", "ieee", "none"])
def test_a_gpu_keeps_all_digits_inside_and_its_setting_after(chosen):
    MATMUL.fp32_precision = chosen
    for device, inside in ((GPU, "ieee"), (CPU, chosen)):
        failing = pytest.raises(KeyError, match=inside)
        with failing, xla_replica.full_matmul_precision(device):
            raise KeyError(MATMUL.fp32_precision)
        assert MATMUL.fp32_precision == chosen


@pytest.mark.parametrize(
    ("of_bfloat16", "inside"), [(False, ("ieee", "highest")), (True, ("tf32", "high"))]
)
@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_torchs_older_setting_is_right_inside_and_as_before(
    chosen, of_bfloat16, inside
):
    """It must not differ from the newer one, which it sets."""
    torch.set_float32_matmul_precision(chosen)
    usual = MATMUL.fp32_precision
    assert MATMUL.allow_tf32 == (chosen != "highest")
    with xla_replica.full_matmul_precision(GPU, of_bfloat16=of_bfloat16):
        assert MATMUL.allow_tf32 == of_bfloat16
        older = torch.get_float32_matmul_precision()
        assert (MATMUL.fp32_precision, older) == inside
    assert MATMUL.fp32_precision == usual
    assert torch.get_float32_matmul_precision() == chosen


def test_torch_tpu_computes_in_torchs_highest_precision_inside():
    """TorchTPU reads torch's setting, which it sets to "medium" when it is loaded."""
    torch.set_float32_matmul_precision("medium")
    with xla_replica.full_matmul_precision(torch.device("privateuseone")):
        assert torch.get_float32_matmul_precision() == "medium"
    with xla_replica.full_matmul_precision(SimpleNamespace(type="tpu")):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"


def products_inside(rank: int) -> tuple[set[str], int, str]:
    """Returns the precisions of a program's products, and then the process's."""
    import torch_xla.backends

    device = xla_replica.current().device
    matrices = [torch.rand(2, 2, 3, device=device), torch.rand(2, 3, 2, device=device)]
    weight = torch.rand(2, 2, device=device, requires_grad=True)
    with xla_replica.full_matmul_precision(device):
        inside = matrices[0] @ matrices[1]
        sums = torch.zeros(4, 2, device=device)
        with torch.no_grad(), xla_replica.full_matmul_precision(device):
            sums[:2].addmm_(weight, inside[0])
        with pytest.raises(RuntimeError, match=r"under torch.no_grad\(\)"):
            inside[0] @ weight
    torch.testing.assert_close(sums[2:].cpu(), torch.zeros(2, 2))
    torch.testing.assert_close(sums[:2].cpu(), weight.cpu() @ inside[0].cpu())
    text = torch_xla._XLAC._get_xla_tensors_hlo([matrices[0] @ matrices[1] + inside])
    found = [precision for _, precision in products(Program(text, ""))]
    return {*found}, len(found), torch_xla.backends.get_mat_mul_precision()


@on_xla
def test_on_torch_xla_products_inside_are_of_that_precision_and_no_others():
    [found] = xla_replica.launch(products_inside, (), 1, "xla")
    assert found == ({"default", "highest"}, 2, "default")
