"""Operations of a sparse model, and reports of a run."""
