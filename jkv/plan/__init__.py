"""What a deployment needs, worked out before there is one: bytes by cause, and the sequences that fit."""
