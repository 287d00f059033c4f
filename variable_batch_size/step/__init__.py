"""One step on one replica: substeps, the sum, the update, and what follows."""
