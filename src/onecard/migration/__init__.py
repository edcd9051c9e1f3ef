"""Settings of other tools become recipes: `onecard new DIR --from FILE`."""
