"""The mechanisms explained: topics, and the numbers behind them."""
