"""The site's page Errors has what the packages' errors say."""

from __future__ import annotations

from support.documents import ROOT

from tools.site import conf, errors

MODULE = '''
class Lost(ValueError): ...

def _late(rank):
    """Returns the error of a replica that is late."""
    return Lost(f"replica {rank} is late: wait for it")

class Check:
    def run(self, name):
        remedy = "pass a name"
        if not name:
            raise TypeError(f"there is no {name!r}, "
                            "and no other: " f"{remedy}")
        told = "one is too many" if name == "one" else f"{name} is one too many"
        raise (ValueError if name else KeyError)(told + self._more())

    def _more(self):
        return ": leave one out"

def outside():
    print("this is not an error")
    raise _late(3)
'''
PLANTED = """
- Lost: ``replica … is late: wait for it``
- TypeError: ``there is no …, and no other: pass a name``
- ValueError or KeyError: ``one is too many: leave one out``
- ValueError or KeyError: ``… is one too many: leave one out``
"""
KNOWN = (
    "compiled another program than its peers for the graph",
    "did not reach … within … s of replica",
    "replicas disagree about collective … of the graph they are about to run",
    "a parameter is on …, but this is …: move the model with model.to(",
    "says that this process is one of several, but torch.distributed is not",
    "must be one of …, got …",
    "it normalises by statistics of the batch",  # of a Refusal
)


def test_messages_are_found_however_they_are_made(tmp_path):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "module.py").write_text(MODULE)
    page = errors.page(tmp_path, ["planted"])
    head, _, found = page.partition("\nplanted.module\n~~~~~~~~~~~~~~\n")
    assert "\nplanted\n-------\n" in head
    assert sorted(found.split("\n")) == sorted(PLANTED.split("\n"))


def test_the_page_has_what_every_package_says():
    page = errors.page(ROOT, conf.PACKAGES)
    assert page.count("\n- ") > 550
    assert all(f"\n{name}\n{'-' * len(name)}\n" in page for name in conf.PACKAGES)
    assert not [said for said in KNOWN if said not in page]
