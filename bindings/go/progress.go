package zebu

import (
	"context"
	"strconv"
	"strings"
)

// follow runs a job to its end, which prints how far it is.
func follow(ctx context.Context, path string, progress chan<- float64, args []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p, err := start(path, &percents{to: progress}, args)
	if err != nil {
		return err
	}
	return p.wait(ctx)
}

// percents reads lines such as "    (12.34/100%)\r".
type percents struct {
	to   chan<- float64
	rest string
}

// longestLine is how much of a line is kept that has no end yet.
const longestLine = 256

func (p *percents) Write(text []byte) (int, error) {
	p.rest += string(text)
	for {
		end := strings.IndexByte(p.rest, '%')
		if end < 0 {
			break
		}
		if begin := strings.LastIndexByte(p.rest[:end], '('); begin >= 0 {
			p.tell(p.rest[begin+1 : end])
		}
		p.rest = p.rest[end+1:]
	}
	if over := len(p.rest) - longestLine; over > 0 {
		p.rest = p.rest[over:]
	}
	return len(text), nil
}

// tell sends what a text such as "12.34/100" says, if it is received at once.
func (p *percents) tell(text string) {
	number, _, _ := strings.Cut(text, "/")
	value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || p.to == nil {
		return
	}
	select {
	case p.to <- value / 100:
	default:
	}
}
