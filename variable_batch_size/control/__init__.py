"""The controller that decides batch sizes while a run lasts."""
