package zebuembed

import _ "embed"

//go:embed zebu-linux-amd64
var program []byte
