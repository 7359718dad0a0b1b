package zebu_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheProgramOfTheReadmeReadsADiskOnAWebServer(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, program, _ := strings.Cut(string(readme), "```go\n")
	program, _, found := strings.Cut(program, "```")
	here, err := filepath.Abs(".")
	if err != nil || !found {
		t.Fatal("README.md has no program", err)
	}
	raw, path := image(t, "vmdk")
	web := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(path))))
	defer web.Close()
	dir := t.TempDir()
	module := "module example.org/fresh\n\ngo 1.23\n\nrequire example.org/zebu/bindings/go v0.1.0\n\n" +
		"replace example.org/zebu/bindings/go => " + here + "\n"
	for name, text := range map[string]string{"go.mod": module, "main.go": program} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	command := exec.Command("go", "run", ".", web.URL+"/image.vmdk")
	command.Dir = dir
	var said bytes.Buffer
	command.Stderr = &said
	disk, err := command.Output()
	if err != nil || !bytes.Equal(disk, raw) {
		t.Fatal("other bytes", len(disk), err, said.String())
	}
}
