"""Experiments by one command each; regard.lab runs them."""
