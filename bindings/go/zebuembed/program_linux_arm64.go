package zebuembed

import _ "embed"

//go:embed zebu-linux-arm64
var program []byte
