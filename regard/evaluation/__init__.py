"""A trained model on data: measured, or asked for labels or vectors."""
