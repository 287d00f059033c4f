"""Rules of single operations of autograd's graph, and runs for fallbacks."""
