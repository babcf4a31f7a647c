"""Single-device model maths: they know no mesh axis."""
