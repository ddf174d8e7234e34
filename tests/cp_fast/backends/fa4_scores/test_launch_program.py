"""What a launch's kernel is kept by: programs that are equal wherever their kernels are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from cp_fast.backends.backend_protocol import LaunchPositions, LaunchScores
from cp_fast.backends.fa4.scores.launch_program import launch_program, traced_scores
from cp_ref.contract.score_inputs import ScoreInputs
from cp_ref.schedules.problem import ScoreOptions
from cp_ref.schedules.words import Unsupported
from tests.cp_fast.backends.fa4_scores.functions import SLOPES, TABLE

DROPOUT = ScoreInputs(dropout_p=0.5, dropout_seed=torch.tensor(3))


def biased(
    score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    return score / 3 + t[h, (q_idx - kv_idx) % 7]


def key(inputs: ScoreInputs, *, by_segment: bool = True, aligned: bool = True, rows: int = 8) -> str:
    """What compiled kernels of a launch are kept by."""
    table = torch.zeros(rows, dtype=torch.int32)
    places = torch.zeros(4, 2, dtype=torch.int32) if by_segment else None
    launch = LaunchScores(LaunchPositions(table, table, table, table, places, aligned), 0, inputs)
    return launch_program(launch, ScoreOptions(0.5)).program.__cute_hash__


def of_score_mod() -> str:
    """The key of a function with a captured tensor."""
    return key(ScoreInputs(score_mod=biased, aux_tensors={"t": TABLE}))


def test_a_kernel_on_disk_has_the_same_key_in_another_process() -> None:
    code = f"from {__name__} import of_score_mod; print(of_score_mod())"
    other = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == of_score_mod()


@pytest.mark.parametrize("inputs", [ScoreInputs(alibi_slopes=SLOPES), DROPOUT], ids=["alibi", "dropout"])
def test_what_is_another_kernel(inputs: ScoreInputs) -> None:
    """Lengths are not; places by row are; aligned ones are for dropout alone, whose random words they share."""
    assert key(inputs) == key(inputs, rows=80) != key(inputs, by_segment=False, aligned=False)
    assert (key(inputs) != key(inputs, aligned=False)) == (inputs.dropout_p > 0)
    assert key(inputs) != key(inputs._replace(dropout_p=0.25, dropout_seed=DROPOUT.dropout_seed))


def test_slopes_of_no_document_are_none_to_read() -> None:
    """A call without documents has slopes [0, h], and no launch. A captured tensor must have an element."""
    assert traced_scores(ScoreInputs(alibi_slopes=torch.zeros(0, 4)), 0.0).captured
    nothing = ScoreInputs(score_mod=biased, aux_tensors={"t": torch.zeros(0, 7)})
    with pytest.raises(Unsupported, match=r"aux_tensors\['t'\] has shape \[0, 7\]; it must have from 1"):
        traced_scores(nothing, 0.0)
