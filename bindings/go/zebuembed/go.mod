module example.org/zebu/bindings/go/zebuembed

go 1.23

require example.org/zebu/bindings/go v0.1.0
