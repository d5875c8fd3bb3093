"""What moolib's examples share."""
