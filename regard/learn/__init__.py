"""The mechanisms explained: topics, and the numbers behind them."""

# They fill explain.TOPICS.
from regard.learn import mechanisms as mechanisms
from regard.learn import newest as newest
from regard.learn import states as states
