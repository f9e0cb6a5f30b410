"""What a run did, as one page."""
