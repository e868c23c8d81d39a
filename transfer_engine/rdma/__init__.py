"""RDMA cards: what the transport and the owner's end of it stand on."""
