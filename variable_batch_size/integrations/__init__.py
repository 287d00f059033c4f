"""The elastic batch in trainers of other libraries; each file is optional."""
