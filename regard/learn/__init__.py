"""The mechanisms explained: topics, and the numbers behind them."""

# It fills explain.TOPICS.
from regard.learn import mechanisms as mechanisms
