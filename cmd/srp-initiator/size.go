package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// parseSize reads a number of bytes: digits and optionally K, M, G, T (powers of 1024; KiB and so on are the same) or kB, MB, GB, TB (of 1000).
func parseSize(s string) (int64, error) {
	digits := strings.TrimRight(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
	unit := s[len(digits):]
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 || strings.HasPrefix(s, "+") {
		return 0, fmt.Errorf("%q is not a size: want digits and optionally K, M, G or T", s)
	}
	mult := int64(1)
	switch unit {
	case "", "B", "b":
	case "K", "k", "KiB", "Ki":
		mult = 1 << 10
	case "M", "m", "MiB", "Mi":
		mult = 1 << 20
	case "G", "g", "GiB", "Gi":
		mult = 1 << 30
	case "T", "t", "TiB", "Ti":
		mult = 1 << 40
	case "kB":
		mult = 1e3
	case "MB":
		mult = 1e6
	case "GB":
		mult = 1e9
	case "TB":
		mult = 1e12
	default:
		return 0, fmt.Errorf("%q is not a size: unknown unit %q, want K, M, G or T", s, unit)
	}
	if n > math.MaxInt64/mult {
		return 0, fmt.Errorf("%q is too large", s)
	}
	return n * mult, nil
}

// sizeFlag is a flag that holds a size in bytes; -1 when not given.
type sizeFlag int64

func (f *sizeFlag) String() string {
	if *f < 0 {
		return ""
	}
	return strconv.FormatInt(int64(*f), 10)
}

func (f *sizeFlag) Set(s string) error {
	n, err := parseSize(s)
	if err == nil {
		*f = sizeFlag(n)
	}
	return err
}

func (f *sizeFlag) Type() string { return "size" }

// humanSize is n bytes in a person's units.
func humanSize(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	return strings.Replace(fmt.Sprintf("%.1f %ciB", v, units[i]), ".0 ", " ", 1)
}
