"""A compact Llama-family decoder with a paged KV cache, for laptops, tests and demonstrations."""
