"""Nothing names what was withdrawn, apart from the changelog and what refuses it."""

import subprocess

import pytest
from support.documents import ROOT

OWN = "test/test_withdrawn.py"
FOLDERS = (
    "*.md", "docs", "examples", "test", "tools", "setup.py", "pyproject.toml",
    "Makefile", "grab_xla", "per_sample_grad", "rigl_xla", "variable_batch_size",
    "xla_replica",
)  # fmt: skip
# Expressions by package; what users might still write is named where it is refused.
WITHDRAWN = {
    "variable_batch_size": r"""
        \bwrite_report\b  vbs.report\b  \bplotly\b  images/report\.png  runs[./]report\b
        \bterminal_chart\b  \bwrite_png\b  trace_tools[./]charts  \bstep_time_of\b
        vbs.(simulate|convert).*--fit\b  vbs.simulate.*--(schedule|total-samples)
        \buse_norm_layers\b  \bnorm_layers\b  \bnorm_noise  \bnorm_factor\b
        \bnoise_estimator\b  gradient_noise\.best\b  damaged-\*
        vbs\.Restored\b  \bepoch_table\b
    """,
    "grab_xla": r"""
        \b[Nn]umba\b  \bhas_numba\b  \bcompiled_rows\b  \btakes_factored\b
        \bFactoredRows\b  \bUnformedRows\b  \bwith_second_moment\b  grab_xla[./]kernels
    """,
    "per_sample_grad": r"""
        \bGradientIndex\b  \bPreconditioner\b  \bSearchResult\b  \bindex_pool\b
        \bopen_index\b  \bbench_index\b  \bgradient_index\b  \bas_before\b  \bsaved_as\b
        \bkeep_nan\b  layers[./]recurrent\b  \bvectorisable\b  fallback=.?"batched"
        \bJOINING\b  joining=
    """,
    "rigl_xla": r"""
        \bsnip_scores\b  layers[./]snip\b  \bglobal_distribution\b
        \b(save|load)_compact\b  \bcompact_file\b  \bsize_in_bytes\b  \bTopologyLog\b
        \bcosts_of\b  \bLayerCost\b  \bCostReport\b  \binference_(flops|macs)\b
        \bgradual_training_ratio\b
    """,
    "xla_replica": r"""
        pytest_plugin(?!s)  \bxla_replicas\b  elastic-xla\[(notebook|report|grab)\]
        \.\[(notebook|report|grab|xla)\]  \bmain_module\b  \bScriptRunner\b
        launch\([^)]*device=.(cuda|tpu).\)
    """,
}
REFUSALS = (
    "per_sample_grad/engine/settings.py",
    "test/per_sample_grad/engine/test_per_sample_fallbacks.py",
    "test/xla_replica/test_replica_refusals.py",
)
RECORDS = "docs/benchmarks/*.json"  # with the versions of what they were made with


@pytest.mark.parametrize("package", WITHDRAWN)
def test_nothing_names_what_was_withdrawn(package):
    pattern = "|".join(WITHDRAWN[package].split())
    others = [f":!{path}" for path in ("CHANGELOG.md", OWN, RECORDS, *REFUSALS)]
    found = subprocess.run(
        ["git", "grep", "-nIP", pattern, "--", *FOLDERS, *others],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (1, "", "")
