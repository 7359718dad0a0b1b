// Package zebu opens disk images of virtual machines by any name that the program zebu takes: files, https://, s3://, nbd://, packed
// files and chains, in qcow2, raw, VMDK, VHDX, VHD, VDI and others. It converts, inspects and serves them, too.
//
// There is no cgo. Each open disk is a process of zebu in its sandbox, which this package starts, speaks NBD with, and ends. No process
// outlives the program, not even when it is killed (on Linux).
//
//	disk, err := zebu.Open(ctx, "https://example.org/disk.vmdk")
//	if err != nil {
//		return err
//	}
//	defer disk.Close()
//	_, err = io.Copy(os.Stdout, io.NewSectionReader(disk, 0, disk.Size()))
//
// The program is looked for in PATH, and is else what the variable ZEBU names.
package zebu
