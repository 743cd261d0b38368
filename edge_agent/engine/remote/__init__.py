"""A server elsewhere as an engine: anything that speaks OpenAI's HTTP API."""
