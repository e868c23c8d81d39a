"""HTTP in front of a conductor or of external engines: the OpenAI API, the indexer's, a page."""
