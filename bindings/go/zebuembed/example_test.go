package zebuembed_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	zebu "example.org/zebu/bindings/go"
	"example.org/zebu/bindings/go/zebuembed"
)

func Example() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	name := filepath.Join(dir, "disk.qcow2")
	if err := zebu.Create(context.Background(), name, 1<<20, zebuembed.Program()); err != nil {
		log.Fatal(err)
	}
	disk, err := zebu.Open(context.Background(), name, zebuembed.Program())
	if err != nil {
		log.Fatal(err)
	}
	defer disk.Close()
	fmt.Println(disk.Size())
	// Output: 1048576
}
