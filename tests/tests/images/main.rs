//! Images and the commands on them, beside QEMU.

mod aged;
mod alignment;
mod allocation;
mod amend;
mod beside_qemu;
mod block_devices;
mod chain_operations;
mod compressed_matrix;
mod compressed_reads;
mod create_matrix;
mod full_disk;
mod large;
mod memory_pressure;
mod preallocation;
mod random_operations;
mod read_matrix;
mod snapshot_matrix;
mod write_matrix;
