module example.org/zebu/bindings/go/compare

go 1.24

require (
	example.org/zebu/bindings/go v0.1.0
	github.com/lima-vm/go-qcow2reader v0.7.1
)

replace example.org/zebu/bindings/go => ../
