package zebu_test

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"example.org/zebu/bindings/go"
)

func TestErrorsSayWhatZebuSays(t *testing.T) {
	_, err := zebu.Open(context.Background(), filepath.Join(t.TempDir(), "none.qcow2"))
	var said *zebu.Error
	if !errors.As(err, &said) || !strings.Contains(said.Message, "none.qcow2") || said.Code != 1 || said.Command != "serve" {
		t.Fatal(err)
	}
}

func TestErrorsHaveKinds(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	_, path := image(t, "qcow2")
	disk := open(t, path, zebu.Writable())
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	tool(t, "qemu-img", "create", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", in("refers.qcow2"), "1M")
	tool(t, "qemu-img", "create", "-f", "qcow2", "--object", "secret,id=s,data=x", "-o",
		"encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", in("secret.qcow2"), "1M")
	os.WriteFile(in("noise"), make([]byte, 4096), 0o600)
	opens := func(name string, with ...zebu.Option) error {
		disk, err := zebu.Open(ctx, name, with...)
		if err == nil {
			disk.Close()
		}
		return err
	}
	_, checked := zebu.Check(ctx, in("noise"))
	for _, one := range []struct {
		what string
		err  error
		kind error
	}{
		{"a missing file", opens(in("none")), zebu.ErrNotFound},
		{"a missing file", opens(in("none")), fs.ErrNotExist},
		{"a missing file on a web server", opens(web.URL + "/none"), zebu.ErrNotFound},
		{"an image in use", opens(path, zebu.Writable()), zebu.ErrLocked},
		{"a refused reference", opens(in("refers.qcow2")), zebu.ErrReferenceRefused},
		{"an allowed reference", opens(in("refers.qcow2"), zebu.AllowRefs("dir=/etc")), nil},
		{"an encrypted image", opens(in("secret.qcow2")), zebu.ErrKey},
		{"another format", opens(in("noise"), zebu.Format("qcow2")), zebu.ErrFormat},
		{"a check of a raw disk", checked, zebu.ErrFormat},
		{"a new image", zebu.Create(ctx, in("new.qcow2"), mib), nil},
		{"an image that is there", zebu.Create(ctx, in("new.qcow2"), mib), zebu.ErrExists},
		{"an image that is there", zebu.Convert(ctx, in("noise"), in("new.qcow2"), zebu.Format("raw")), zebu.ErrExists},
		{"an image that is replaced", zebu.Create(ctx, in("new.qcow2"), mib, zebu.Force()), nil},
		{"a missing export", func() error { _, err := disk.Info(ctx); return err }(), nil},
		{"no program", opens("x", zebu.Program("/none/zebu")), fs.ErrNotExist},
	} {
		if !errors.Is(one.err, one.kind) {
			t.Errorf("%s: %v is not %v", one.what, one.err, one.kind)
		}
	}
}

func TestOptionsWithoutUseAreRefused(t *testing.T) {
	_, err := zebu.Info(context.Background(), "x", zebu.Writable())
	if err == nil || !strings.Contains(err.Error(), "Info has no use for the option Writable") {
		t.Fatal(err)
	}
}

func TestTheProgramIsNamedOrFound(t *testing.T) {
	t.Setenv("ZEBU", "/none/zebu")
	_, err := zebu.Info(context.Background(), "x")
	if !errors.Is(err, zebu.ErrNoProgram) || !strings.Contains(err.Error(), "/none/zebu") {
		t.Fatal(err)
	}
	t.Setenv("ZEBU", "")
	t.Setenv("PATH", t.TempDir())
	if _, err = zebu.Info(context.Background(), "x"); !errors.Is(err, zebu.ErrNoProgram) {
		t.Fatal(err)
	}
}

func TestAProgramOfAnotherVersionIsRefused(t *testing.T) {
	t.Setenv("ZEBU_TEST_PLAYS", `{"result": {"version": "9.8.7", "control": 2}}`)
	_, err := zebu.Serve(context.Background(), []string{"x"}, zebu.Program(os.Args[0]))
	var told *zebu.VersionError
	if !errors.Is(err, zebu.ErrVersion) || !errors.As(err, &told) || told.Control != 2 {
		t.Fatal(err)
	}
	for _, version := range []string{"9.8.7", zebu.Version} {
		if !strings.Contains(err.Error(), version) {
			t.Fatal(err)
		}
	}
	t.Setenv("ZEBU_TEST_PLAYS", `{"error": {"message": "there is no command version"}}`)
	if _, err = zebu.Open(context.Background(), "x", zebu.Program(os.Args[0])); !errors.Is(err, zebu.ErrVersion) {
		t.Fatal(err)
	}
	if _, err = zebu.Open(context.Background(), "x", zebu.Program("true")); err == nil {
		t.Fatal("a program that is not zebu")
	}
}
