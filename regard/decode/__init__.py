"""How models write: the choice of the next token and the search for a sequence."""
