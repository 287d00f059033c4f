"""Updates of several optimizers of one sampler, after the step's last backward pass.

An update of one network before the loss of another one is computed would make the
weights depend on the number of replicas.
"""

from __future__ import annotations

from variable_batch_size.data.account import Account


def update_together(own: Account) -> int:
    """Makes the updates of all optimizers of a sampler, when the last one comes here.

    What is attached runs, and saves, after all updates. Returns the number of updates
    of each; 0 where others have not ended the step.
    """
    accounts = [*own.ledger.accounts.values()]
    own.is_waiting = True
    if not all(account.is_waiting for account in accounts):
        own.owner.scaling.note_given(own)
        own.owner.gradients.start_records()
        return 0
    for account in accounts:
        account.is_waiting = False
        if account is not own:  # since its own step()
            account.owner.scaling.refuse_changes(account)
            account.owner.gradients.refuse_changes()
    numbers = [account.owner.update(is_alone=False) for account in accounts]
    for account, number in zip(accounts, numbers):
        if number:
            account.owner.after(account.owner.made)
    return numbers[accounts.index(own)]
