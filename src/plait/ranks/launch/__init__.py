"""The start of ranks: as processes of this host, as threads, or under a launcher; their rendezvous."""
