"""Sparse training whose topology follows the gradient, without a host round trip."""

__all__: list[str] = []
