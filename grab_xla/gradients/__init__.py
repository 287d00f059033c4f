"""What is balanced of a model's backward pass, and the rows that it becomes."""
