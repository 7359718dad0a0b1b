package zebu_test

import (
	"context"
	"fmt"
	"log"

	"example.org/zebu/bindings/go"
)

func ExampleOpen() {
	disk, err := zebu.Open(context.Background(), "null-co://,size=1048576")
	if err != nil {
		log.Fatal(err)
	}
	defer disk.Close()
	first := make([]byte, 4)
	if _, err := disk.ReadAt(first, 0); err != nil {
		log.Fatal(err)
	}
	fmt.Println(disk.Size(), first)
}
