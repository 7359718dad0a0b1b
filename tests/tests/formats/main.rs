//! Formats of other programs, packed disks and hostile files.

mod appliances;
mod bad_input;
mod foreign_damage;
mod foreign_matrix;
mod foreign_write;
mod other_machines;
mod packed_sources;
mod peers;
mod strangers;
