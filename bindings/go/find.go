package zebu

import (
	"fmt"
	"os"
	"os/exec"
)

// find returns the path of the program: what an option names, then what the variable ZEBU names, then the first one in PATH.
func (o options) find() (string, error) {
	if o.program != nil {
		return o.program()
	}
	if named := os.Getenv("ZEBU"); named != "" {
		path, err := exec.LookPath(named)
		if err != nil {
			return "", fmt.Errorf("%w: the variable ZEBU names '%s', which can't be run: %w", ErrNoProgram, named, err)
		}
		return path, nil
	}
	path, err := exec.LookPath("zebu")
	if err != nil {
		return "", fmt.Errorf("%w: install zebu, name it by the variable ZEBU, or embed it (package zebuembed): %w", ErrNoProgram, err)
	}
	return path, nil
}
