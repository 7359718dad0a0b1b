module example.org/zebu/bindings/go

go 1.23
