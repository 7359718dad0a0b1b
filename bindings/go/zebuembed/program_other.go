//go:build !linux || !(amd64 || arm64)

package zebuembed

var program []byte
