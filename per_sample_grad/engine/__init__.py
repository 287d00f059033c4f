"""`Capture`: one forward and one backward pass, checked against autograd."""
