package zebu

// Version is the version of this package, which is that of the program it was made for.
const Version = "0.1.0"

// ControlVersion is the version of the control socket that this package speaks.
const ControlVersion = 1
