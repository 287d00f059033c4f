"""The site that `make docs` builds has every page, public name and error."""

import importlib

from support.documents import ROOT, pages, read

from tools.site import conf, errors

KNOWN = (
    "compiled another program than its peers for the graph",
    "did not reach … within … s of replica",
    "replicas disagree about collective … of the graph they are about to run",
    "a parameter is on …, but this is …: move the model with model.to(",
    "says that this process is one of several, but torch.distributed is not",
    "must be one of …, got …",
    "it normalises by statistics of the batch",  # of a Refusal
)


def test_the_contents_name_every_page_once():
    listed = [
        page
        for table in conf.TABLES
        for named in conf.contents(table).values()
        for page in named
    ]
    found = {page.relative_to(ROOT).with_suffix("").as_posix() for page in pages()}
    written = [page for page in listed if not page.startswith("build/reference/")]
    assert sorted(written) == sorted(found - {conf.root_doc} | {"examples/README"})


def test_the_reference_has_a_page_of_what_every_package_exports():
    listed = conf.contents(conf.root_doc)["Reference"]
    assert [page.rpartition("/")[2] for page in listed] == [*conf.REFERENCE, "errors"]
    for name in conf.REFERENCE:
        assert conf.exported(name) == importlib.import_module(name).__all__


def test_troubleshooting_leads_to_the_page_of_all_errors_however_they_are_made():
    source = [read("docs/troubleshooting.md")]
    conf.add_contents(None, "docs/troubleshooting", source)
    assert "[Errors](/build/reference/errors)" in source[0]
    page = errors.page(ROOT, conf.PACKAGES)
    assert page.count("\n- ") > 500
    assert all(f"\n{name}\n{'-' * len(name)}\n" in page for name in conf.PACKAGES)
    assert all(said in page for said in KNOWN)
