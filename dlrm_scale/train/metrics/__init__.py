"""AUC, logloss and what else is told of scores."""
