"""Every decision of the gateway: pure code, standard library only, time passed in."""
