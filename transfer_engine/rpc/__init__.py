"""Three thin drivers over the wire codec: a server, a blocking client, an asyncio client."""
