"""Tests of the MQTT gateway. `traps.md` says which test covers which trap of the design."""
