//! Encrypted images, beside QEMU and cryptsetup.

mod cryptsetup_payloads;
mod encryption;
mod encryption_leaks;
mod encryption_matrix;
mod hostile_luks;
mod large_sectors;
