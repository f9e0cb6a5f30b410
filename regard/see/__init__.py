"""Looking inside: what a model attends to, and the numbers behind the mechanisms."""
