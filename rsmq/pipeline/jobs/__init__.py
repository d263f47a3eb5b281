"""The jobs that move data: archive, compact, replay and send."""
