"""Fast forms of what the layers above define, with torch alone: each has a plain form and a test that they agree."""
