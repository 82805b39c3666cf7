"""One deployed peer: its data, its ledger, its folder, and its sessions with its neighbours."""
